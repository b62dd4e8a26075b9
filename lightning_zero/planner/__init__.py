"""Says before a run what every stage will hold and send."""
