"""One call of an op on DTensors: schema, operands, resolution by rule, execution, fallback and tracing."""

from shardwise.call.op_call import OpCall
from shardwise.call.route import Route, Run
from shardwise.call.schema import OpInfo, op_info
from shardwise.call.trace import TracedCall, trace_calls

__all__ = ["OpCall", "OpInfo", "Route", "Run", "TracedCall", "op_info", "trace_calls"]
