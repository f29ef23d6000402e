"""The template: methods, their update, and the optimizer that runs them."""
