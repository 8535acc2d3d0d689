// The network: a WebAssembly module compiled from the exported C code.
async function loadNetwork(base64, outputs) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  const { instance } = await WebAssembly.instantiate(bytes);
  const api = instance.exports;
  const view = (kind, address, count) => new kind(api.memory.buffer, address, count);
  return {
    reset: () => api.reset(),
    // Read a pixel and return the units with an event and the values that they emit.
    step(pixel) {
      const count = api.step(pixel);
      if (count < 0) throw new Error("the network rejects the pixel " + pixel);
      return {
        units: Uint16Array.from(view(Uint16Array, api.event_index(), count)),
        values: Float32Array.from(view(Float32Array, api.event_value(), count)),
      };
    },
    scores: () => Float32Array.from(view(Float32Array, api.scores(), outputs)),
    macs: () => api.macs(),
  };
}

function softmax(scores) {
  const largest = Math.max(...scores);
  const powers = Array.from(scores, (score) => Math.exp(score - largest));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}
