"""Copies of state on a worker's own disk, in LMDB."""
