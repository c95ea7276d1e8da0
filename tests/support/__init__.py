"""Helpers of the tests: jobs, layouts, parameters and fake ranks. No tests are in here."""
