"""The files of a checkpoint, on local disks and object stores."""
