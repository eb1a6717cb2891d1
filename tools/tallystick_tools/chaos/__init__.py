"""Run a user's own program under faults, and compare what it wrote with an undisturbed run."""
