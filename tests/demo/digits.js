// Run parts of the page in Node.js. Arguments: a script with the network, a JSON file with images and strokes. Prints
// scores, events and multiply-accumulates of the images, and the digits that the network reads from the strokes.
const fs = require("fs");
const [script, input] = process.argv.slice(2);
const names = "toImage, loadNetwork, EXAMPLES, WASM";
const { toImage, loadNetwork, EXAMPLES, WASM } = new Function(
  fs.readFileSync(script, "utf8") + `\nreturn { ${names} };`
)();
const { images, drawings } = JSON.parse(fs.readFileSync(input, "utf8"));
loadNetwork(WASM, 10).then((network) => {
  const read = (image) => {
    let events = 0;
    network.reset();
    for (const pixel of image) events += network.step(pixel).units.length;
    const scores = Array.from(network.scores());
    return { scores, events, macs: network.macs(), digit: scores.indexOf(Math.max(...scores)) };
  };
  const prepared = drawings.map(toImage);
  console.log(
    JSON.stringify({
      images: images.map(read),
      drawn: prepared.map((image) => read(image).digit),
      prepared: prepared.map((image) => Array.from(image)),
      examples: EXAMPLES.map((strokes) => read(toImage(strokes)).digit),
    })
  );
});
