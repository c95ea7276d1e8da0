"""Tests that others run over what they add to this package. Imported by nobody here."""
