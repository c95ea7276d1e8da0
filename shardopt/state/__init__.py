"""The state of an app: nested and flat, by names, as plain values, and the options of param groups."""
