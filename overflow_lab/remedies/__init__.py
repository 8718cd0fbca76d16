"""What mends a finding, each remedy proven by a second scan."""
