"""What the package asks of the interpreter and the system, beneath all else."""
