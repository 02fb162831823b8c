"""The tensor: its class, its conversion from and to local tensors, redistribution, policy and random state."""

from shardwise.plan.settings import share_with_other_threads
from shardwise.random.stream import follow_torch_seed, follow_torch_state, snapshot
from shardwise.tensor.construct import rebuild
from shardwise.tensor.dtensor import DTensor, implementation
from shardwise.tensor.graph_functions import support_compile
from shardwise.tensor.indexing import replicated_index
from shardwise.tensor.inference_data import data_of_inference_tensor, note_data
from shardwise.tensor.local import from_local, to_local
from shardwise.tensor.local_mode import support_local_tensors
from shardwise.tensor.placement_methods import add_placement_methods
from shardwise.tensor.redistribute import redistribute, to_layout
from shardwise.tensor.serialization import allow_loading
from shardwise.torch_internals.rng import watch_torch_seeding
from shardwise.torch_internals.thread_state import inherited_object, publish_object

__all__ = ["DTensor"]

implementation.from_local = from_local
implementation.to_local = to_local
implementation.redistribute = redistribute
implementation.to_layout = to_layout
implementation.data_of_inference_tensor = data_of_inference_tensor
implementation.note_data = note_data
implementation.index_of = replicated_index
implementation.rebuild = rebuild
allow_loading()
support_local_tensors()
add_placement_methods()
support_compile()
watch_torch_seeding(on_seed=follow_torch_seed, save=snapshot, restore=follow_torch_state)
share_with_other_threads(
    lambda settings: publish_object("shardwise", settings), lambda: inherited_object("shardwise")
)
