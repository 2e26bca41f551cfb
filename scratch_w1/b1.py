import sys, time, jax, jax.numpy as jnp, numpy as np
from overlap import Config
from overlap.frame.activation import traced
from overlap.frame.operands import Operands
from overlap.kernels import epilogue
from overlap.single_gpu import grouped_product
from tests.ops.grouped_plans import plan_of
act = lambda g,u: jax.nn.silu(g)*u
A,_=traced(act,arrays=2)
def timeit(f, *a):
    f(*a); jax.block_until_ready(f(*a))
    best=1e9
    for _ in range(5):
        t=time.perf_counter()
        for _ in range(10): o=f(*a)
        jax.block_until_ready(o); best=min(best,(time.perf_counter()-t)/10)
    return best*1e6
bf=jnp.bfloat16
def rnd(i,s,d=bf): return jax.random.normal(jax.random.key(i),s,d)
print(jax.devices())
P={"schedule":"pingpong"}
for name,C,R,E,H,I in (("qwen",262144,65536,32,2048,768),("mixtral",65536,16384,2,4096,14336)):
    sizes=jnp.full((E,),R//E,jnp.int32)
    dy=rnd(0,(C,H)); Wd=rnd(1,(E,I,H))*0.02; gate=rnd(2,(C,I)); up=rnd(3,(C,I)); w=jnp.ones((C,),jnp.float32)*0.125
    x=rnd(4,(C,H)); W=rnd(5,(E,H,I))*0.02; W2=rnd(6,(E,H,I))*0.02
    W,W2,Wd=(a.astype(bf) for a in (W,W2,Wd))
    flop=2*R*H*I
    def b1(cfg,mode):
        c=Config(**cfg)
        if mode=="cot":
            def f(dy,Wd,gate,up,w,sizes):
                g=Operands(dy,(Wd,),group_sizes=sizes)
                return grouped_product.rows(g,plan_of(g,c,bf,True),through=grouped_product.Through(epilogue.Through(A.of_cotangent(),3,True),(gate,up),w))
            return jax.jit(f),(dy,Wd,gate,up,w,sizes)
        if mode=="plain":
            def f(dy,Wd,sizes):
                g=Operands(dy,(Wd,),group_sizes=sizes)
                return grouped_product.rows(g,plan_of(g,c,bf,True))
            return jax.jit(f),(dy,Wd,sizes)
        if mode=="values":
            def f(x,W,W2,sizes):
                g=Operands(x,(W,W2),group_sizes=sizes)
                return grouped_product.rows(g,plan_of(g,c,bf,False,gated=A),through=grouped_product.Through(epilogue.Through(A.with_values(bf),3)))
            return jax.jit(f),(x,W,W2,sizes)
        if mode=="gated":
            def f(x,W,W2,sizes):
                g=Operands(x,(W,W2),group_sizes=sizes)
                return grouped_product.rows(g,plan_of(g,c,bf,False,gated=A))
            return jax.jit(f),(x,W,W2,sizes)
    cfgs=[dict(tile_m=128,tile_n=128,stages=3),dict(tile_m=128,tile_n=128,stages=4),dict(tile_m=64,tile_n=256,stages=3),dict(tile_m=64,tile_n=128,stages=5,**P),dict(tile_m=64,tile_n=128,stages=4,**P),dict(tile_m=64,tile_n=64,stages=6,**P),dict(tile_m=64,tile_n=192,stages=2,**P)]
    for mode in ("cot",):
        res=[]
        for cfg in cfgs:
            try:
                f,a=b1(cfg,mode); res.append((timeit(f,*a),cfg))
            except Exception as e:
                print(cfg,str(e)[:100])
        res.sort(key=lambda r:r[0])
        for us,cfg in res[:5]: print(name,mode,f"{us:.0f} us {flop/us/1e6:.0f} TF",cfg,flush=True)
