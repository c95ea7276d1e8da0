"""The sources of checkpoints, our own format and others, all read through one reader."""
