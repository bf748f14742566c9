"""Jobs whose ranks are killed, and that must end with the bits of an undisturbed one."""
