"""Topics to splits: subscription, enumerator, offsets, losses."""
