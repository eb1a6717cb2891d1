"""Measures Tallystick and its peers on the same work: how jobs are set up, run, watched, judged."""
