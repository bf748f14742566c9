"""What `mpistrat doctor` looks at; each check gives findings."""
