"""Where a run stands in its data: samplers that resume, mixtures of them, and random states."""
