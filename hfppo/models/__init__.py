"""Actor, reference and critic: one frozen base, adapters and a value head; how they are loaded, laid out and run."""

import warnings

# PEFT 0.21 reads this attribute of every model that it wraps; transformers 5.20 has renamed it.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
