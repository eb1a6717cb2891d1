"""Programs that kill pipelines and judge their output: the commands `chaos` and `demo`."""
