"""Jobs of the playground's studio, drawn in this process, and what it says of them."""

import json

import numpy as np

from unfog.serve.playground.channel import Message
from unfog.serve.playground.inputs import Inputs
from unfog.serve.playground.studio import Studio


class Said:
    """A channel that keeps what is said, and cancels at a step."""

    def __init__(self, until=None):
        self.messages, self.until = [], until

    def is_cancelled(self, job):
        return self.until is not None and self.count("step") > self.until

    def send(self, event, job, body=b"", **facts):
        json.dumps(facts)
        self.messages.append(Message({"event": event, "job": job, **facts}, body))

    def of(self, event):
        return [message for message in self.messages if message.head["event"] == event]

    def count(self, event):
        return len(self.of(event))


def draw(run, until=None, image=b"", mask=b"", given=None, **settings):
    inputs = Inputs(image, mask, given or {})
    head = {"run": str(run.path), "weights": {"device": "cpu", "step": None}, **inputs.head}
    said = Said(until)
    Studio().draw(said, 7, Message({**head, "settings": {"n": 2, **settings}}, inputs.body))
    return said


def pixels(message):
    return np.frombuffer(message.body, np.uint8).reshape(message.head["images"])
