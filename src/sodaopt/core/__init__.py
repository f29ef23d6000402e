"""The template: the record of a method, its update, and the optimizer that runs it."""
