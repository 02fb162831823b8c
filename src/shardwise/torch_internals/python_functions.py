"""Python functions of torch that create plain tensors on the way, by their dotted names."""

from __future__ import annotations

__all__ = ["CREATE_PLAIN_TENSORS", "DISTRIBUTIONS", "PASS_PLAIN_TENSORS", "READ_MEMORY"]

CREATE_PLAIN_TENSORS = {
    "torch.nn.init.sparse_": "the positions of zeros",
    "torch.nn.utils.rnn.unpad_sequence": "the positions in a sequence",
    "torch._lowrank.get_approximate_basis": "a random matrix",
    "torch.functional._unravel_index": "the strides of the shape",
    "torch.masked._ops._std_var": "the number of elements",
    "torch.masked._ops.mean": "the number of elements",
    "torch.masked.mean": "the number of elements",
    "torch.nn.modules.transformer._detect_is_causal_mask": "a causal mask",
    "torch.nn.functional.multi_head_attention_forward": "the attention to nothing (`add_zero_attn`)",
    "torch.nn.utils.parametrizations._Orthogonal.forward": "the identity matrix",
    "torch.nn.utils.parametrizations._Orthogonal.right_inverse": "the identity matrix",
    "torch.nn.utils.parametrizations.orthogonal": "the identity matrix",
}
"""By function: what it creates."""
DISTRIBUTIONS = {
    "normal.Normal": ("rsample",),
    "uniform.Uniform": ("rsample",),
    "laplace.Laplace": ("rsample",),
    "studentT.StudentT": ("rsample",),
    "multivariate_normal.MultivariateNormal": ("__init__", "rsample"),
    "lowrank_multivariate_normal.LowRankMultivariateNormal": ("rsample",),
    "continuous_bernoulli.ContinuousBernoulli": ("sample", "rsample"),
    "generalized_pareto.GeneralizedPareto": ("rsample",),
    "geometric.Geometric": ("sample",),
    "relaxed_bernoulli.LogitRelaxedBernoulli": ("rsample",),
    "relaxed_categorical.ExpRelaxedCategorical": ("rsample",),
    "von_mises.VonMises": ("sample",),
    "lkj_cholesky.LKJCholesky": ("__init__", "sample", "log_prob"),
    "wishart.Wishart": ("__init__", "expand", "rsample", "log_prob", "entropy"),
    "binomial.Binomial": ("entropy", "enumerate_support"),
    "multinomial.Multinomial": ("entropy",),
    "bernoulli.Bernoulli": ("enumerate_support",),
    "categorical.Categorical": ("enumerate_support",),
    "one_hot_categorical.OneHotCategorical": ("enumerate_support",),
}
"""Classes of `torch.distributions`, by their modules, and methods of theirs that create random numbers or values plain."""
PASS_PLAIN_TENSORS = {"torch.autograd.gradcheck._gradcheck_helper": "perturbations and random gradients"}
"""The same of functions of torch whose arguments are such tensors."""
READ_MEMORY = {
    "torch.nested.nested_tensor": "torch.nested.nested_tensor([t.to_local() for t in tensors])",
    "torch.nested.as_nested_tensor": "torch.nested.as_nested_tensor([t.to_local() for t in tensors])",
    "torch.nested.nested_tensor_from_jagged": "torch.nested.nested_tensor_from_jagged(x.to_local(), ...)",
    "torch.nested.narrow": "torch.nested.narrow(x.to_local(), ...)",
    "torch.nested.masked_select": "torch.nested.masked_select(x.to_local(), ...)",
    "torch.utils.dlpack.to_dlpack": "torch.utils.dlpack.to_dlpack(x.to_local())",
    "torch.to_dlpack": "torch.utils.dlpack.to_dlpack(x.to_local())",
}
"""Functions that read the memory of a tensor without an op, by what a program can call for a block instead."""
