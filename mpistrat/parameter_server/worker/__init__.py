"""A worker: its access to the variables, and the step that pushes gradients."""
