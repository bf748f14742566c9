"""What `mpistrat doctor` looks at: an organ a file, each giving findings."""
