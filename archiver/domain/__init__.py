"""Pure decisions: no clock, no disk, no logging, no SDK."""
