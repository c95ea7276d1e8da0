"""Planning of saves: the state of the job, and which rank writes which boxes of it. No I/O."""
