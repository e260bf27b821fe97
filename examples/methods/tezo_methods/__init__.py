"""Methods of others, which tezo knows by their names where this distribution is installed. One file each."""
