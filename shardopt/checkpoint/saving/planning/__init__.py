"""Plans saves: the state of the job, and which rank writes which boxes. No I/O."""
