// Run a WebAssembly module in Node.js and print the words that it emits.
const fs = require("fs");
const words = [];
const imports = { env: { emit: (word) => words.push((word >>> 0).toString(16).padStart(8, "0")) } };
WebAssembly.instantiate(fs.readFileSync(process.argv[2]), imports).then(({ instance }) => {
  instance.exports.run();
  console.log(words.join("\n"));
});
