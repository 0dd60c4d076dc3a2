"""Operations on matrices of models, [n, d] or [m, d], independent of learning.

`linalg`: distances, means, ranks. `order_statistics`: medians and trimmed means per coordinate; `selection`:
the same for many slots, by counting. `nn`: mapping over stacked models. `convolution`: convolutions and
pools. May import only `types`.
"""
