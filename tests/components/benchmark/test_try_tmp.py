import time
from components.benchmark.stage import BenchmarkConfig, run


def test_it(digits_engines, digits_data, run_stage):
    t = time.time()
    m = run_stage(run, BenchmarkConfig(), engines=digits_engines, data=digits_data)
    print(time.time() - t, m.spec.model_dump_json(indent=1))
    import numpy as np

    with np.load(m.file("samples.npz"), allow_pickle=False) as z:
        print({k: z[k].shape for k in z.files})
