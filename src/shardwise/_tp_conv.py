"""Where torch keeps the exchange of rows for convolutions along split dims."""

from shardwise._absent import absent

__all__: list[str] = []

__getattr__ = absent(
    "_tp_conv",
    "_is_supported _requires_data_exchange _ring_send_recv_aggregate _ring_send_recv_construct "
    "convolution_backward_handler convolution_handler tp_convolution tp_convolution_backward",
    why="Halos are programs of `shardwise.alternatives`, chosen by their cost.",
    fix="Call the convolution on DTensors.",
)
