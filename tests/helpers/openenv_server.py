"""A server of OpenEnv with a game for the tests: `python openenv_server.py PORT SECONDS`.

Guess a number from 0 to 2 in two turns; the seed decides it. It stops by itself after SECONDS.
"""

import sys
import threading


class Game:
    """The rules, which the double of the client plays too."""

    def reset(self, seed, level=1):
        self.number, self.turns = seed % 3, 0
        return f"A number from 0 to {2 * level}?"

    def step(self, text):
        self.turns += 1
        right = text.strip() == str(self.number)
        return "" if right else "No.", float(right), right or self.turns == 2


def serve(port, seconds):
    """Serve the game on the loopback interface."""
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_app

    class Guess(Action):
        text: str

    class Hint(Observation):
        prompt: str = ""

    class Guessing(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.game, self.counted = Game(), State()

        def reset(self, seed=None, episode_id=None, **more):
            return Hint(prompt=self.game.reset(seed, **more))

        def step(self, action, timeout_s=None, **more):
            text, reward, done = self.game.step(action.text)
            return Hint(prompt=text, reward=reward, done=done)

        @property
        def state(self):
            return self.counted

    app = create_app(Guessing, Guess, Hint, env_name="guessing", max_concurrent_envs=64)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    threading.Timer(seconds, lambda: setattr(server, "should_exit", True)).start()
    server.run()


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]))
