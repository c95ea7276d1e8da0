"""The state of an app: nested, flat, by names, as plain values, and the options of param groups."""
