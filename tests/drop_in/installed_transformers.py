"""Imports what clients need, after `shardwise.install()`."""

import shardwise

shardwise.install()

import transformers  # noqa: E402
import transformers.modeling_utils  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: E402, F401

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
