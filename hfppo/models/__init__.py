"""Actor, reference and critic: one frozen base, adapters and a value head; how they are loaded, laid out and run."""
