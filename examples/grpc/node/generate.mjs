// Ask a running cluster (`make run`) over gRPC, from the proto itself: a stream with a deadline, one that is cancelled,
// and an error that names its field.
//
// npm install && node generate.mjs [ADDRESS]

import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const protos = process.env.PROTOS ?? new URL("../../../protos", import.meta.url).pathname;
const loaded = loadSync("tandem/v1/llm.proto", { includeDirs: [protos], keepCase: true, longs: Number, enums: String });
const { LLMService } = grpc.loadPackageDefinition(loaded).tandem.v1;
const client = new LLMService(process.argv[2] ?? "127.0.0.1:50051", grpc.credentials.createInsecure());
const options = (seconds) => ({ deadline: Date.now() + seconds * 1000 });
const unary = (method, request) =>
  new Promise((done, failed) =>
    client[method](request, new grpc.Metadata(), options(60), (error, answer) => (error ? failed(error) : done(answer))),
  );

const model = (await unary("ListModels", {})).models[0].id;
const ask = { model, prompt: "import ", sampling: { max_tokens: 24, temperature: 0 } };

for await (const part of client.Generate(ask, new grpc.Metadata(), options(60))) process.stdout.write(part.text);
console.log();

const whole = await unary("GenerateUnary", { generate: ask });
console.log(`${whole.usage.completion_tokens} tokens by ${whole.path.decode_worker}`);

const long = client.Generate({ ...ask, sampling: { max_tokens: 500, ignore_eos: true } }, new grpc.Metadata(), options(60));
try {
  for await (const part of long) long.cancel(); // the workers free what it holds
} catch (error) {
  console.log("left:", grpc.status[error.code]);
}

try {
  await unary("GenerateUnary", { generate: { ...ask, sampling: { temperature: 9 } } });
} catch (error) {
  console.log("refused:", grpc.status[error.code], error.details);
}
client.close();
