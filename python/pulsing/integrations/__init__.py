"""Pulsing inside jobs that something else started: Ray, torchrun. Neither is imported before it is used."""
