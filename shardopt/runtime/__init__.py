"""The package's needs from the interpreter, the system and torch's private parts, below all other rooms."""
