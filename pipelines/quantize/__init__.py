"""A bare ONNX file in int8: calibrated, judged against itself in fp32. No stage: `hpml quantize` runs it."""
