"""Which drafters there are for a model, what each would bring on this machine, and what it would cost."""
