// Reads objects as JSON; prints, for each, what its API's own schema finds wrong, or null.
import { readFileSync } from "node:fs";

const packages = {
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
  "gateway.networking.k8s.io": "gateway-api",
};
const [folder] = process.argv.slice(2);
const found = [];
for (const object of JSON.parse(readFileSync(0, "utf8"))) {
  const [group, version] = object.apiVersion.split("/");
  const home = `${folder}/node_modules/@kubernetes-models/${packages[group]}`;
  const models = await import(`${home}/${group}/${version}/index.js`);
  try {
    new models[object.kind](object).validate();
    found.push(null);
  } catch (error) {
    found.push(error.message);
  }
}
console.log(JSON.stringify(found));
