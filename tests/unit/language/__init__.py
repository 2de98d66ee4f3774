"""Unit tests of the language worker's decisions."""
