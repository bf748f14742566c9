"""The coordinator: one rank schedules functions, the workers of a strategy run them; `mpistrat.coordinator` re-exports it."""
