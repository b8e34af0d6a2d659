"""Tests of `proxvi.training`."""
