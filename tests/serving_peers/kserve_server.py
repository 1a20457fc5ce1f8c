"""KServe's Python server: python kserve_server.py PORT."""

import sys

import engine
from kserve import InferOutput, InferResponse, Model, ModelServer


class Peer(Model):
    def __init__(self) -> None:
        super().__init__("peer")
        self.ready = True

    def load(self) -> bool:
        return True

    def predict(self, payload, headers=None):
        logits = engine.run(payload.inputs[0].as_numpy())
        output = InferOutput("logits", list(logits.shape), "FP32")
        output.set_data_from_numpy(logits, binary_data=True)
        return InferResponse(payload.id or "1", "peer", [output])


ModelServer(http_port=int(sys.argv[1]), enable_grpc=False, workers=1, access_log_format=None).start([Peer()])
