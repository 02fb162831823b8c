"""Imports what clients need, on torch's own DTensor."""

import transformers
import transformers.modeling_utils
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
