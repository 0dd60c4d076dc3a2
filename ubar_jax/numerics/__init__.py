"""Operations on matrices of models, [n, d] or [m, d], independent of learning.

`linalg`: distances, means, ranks. `order_statistics`: medians and trimmed means per coordinate. `nn`: mapping
over stacked models, convolutions and pools. May import only `types`.
"""
