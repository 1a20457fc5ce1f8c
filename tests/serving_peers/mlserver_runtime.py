"""MLServer's runtime, without the processes for parallel inference: mlserver start FOLDER."""

import engine
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Peer(MLModel):
    async def load(self) -> bool:
        return True

    async def predict(self, payload):
        logits = engine.run(NumpyCodec.decode_input(payload.inputs[0]))
        return InferenceResponse(model_name="peer", outputs=[NumpyCodec.encode_output("logits", logits)])
