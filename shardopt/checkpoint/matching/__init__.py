"""Whether a checkpoint fits an app, before a byte has changed."""
