"""The examples, as a package, so that configuration files can name what is in them."""
