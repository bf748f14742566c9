"""A worker: its way to the variables, and the step that pushes gradients."""
