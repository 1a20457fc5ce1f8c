"""BentoML: bentoml serve bentoml_service:Peer --port PORT."""

import bentoml
import numpy as np


@bentoml.service(workers=1)
class Peer:
    def __init__(self) -> None:
        import engine

        self.engine = engine

    @bentoml.api
    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.engine.run(x.astype(np.float32))
